"""The bundled trainer, which `fcp launch` runs without a script. `python -m fcp_cli.training.train --help`."""
