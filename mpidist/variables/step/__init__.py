"""The synchronous step: plans, bundles and tables of variables, and how a step goes through them."""
