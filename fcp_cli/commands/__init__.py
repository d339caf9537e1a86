"""One file per verb, which `app.py` puts together. None imports anything heavy at its top."""
