"""The definitions of commands, a module each. `cli.main` imports a module when its command runs."""
