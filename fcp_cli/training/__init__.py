"""The bundled trainer: what `fcp launch` runs when it is given no script. `python -m fcp_cli.training.train --help`."""
