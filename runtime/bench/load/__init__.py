"""Load on a service: arrivals, the generator, its clients, and the servers it measures."""
