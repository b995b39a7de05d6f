"""The router's HTTP: requests of clients, calls to engines, and answers."""
