"""The choice of a backend: by availability, by speed, and by the user's wish."""
