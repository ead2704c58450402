"""The choice of a backend: by availability, by measured speed, and by the user's options."""
