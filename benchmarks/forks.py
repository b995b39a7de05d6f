"""Imported first by the process that forks a benchmark's children: none outlives the script."""

from tests.support.orphans import end_with_parent

end_with_parent()
