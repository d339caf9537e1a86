"""The jobs that `fcp launch` started or submitted: how they stand, what they print, and how they are ended."""
