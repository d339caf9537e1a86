"""The jobs that `fcp launch` started or submitted: their status, output, and cancellation."""
