"""The memory that cells pass through, and copies between it and pages."""
