"""One file per command, registered in `app.py`. Heavy modules are imported inside functions, to keep --help fast."""
