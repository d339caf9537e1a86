"""The command line: options as dataclasses, `fcp.yaml`, trusted folders, known and retired names."""
