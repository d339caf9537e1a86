"""Length manifests (`fcp-manifest/1`): build, read, validate."""
