"""What coordinator, servers and workers tell each other."""
