"""The parts that several commands share."""
