"""One file per verb, registered in `app.py`. None imports anything heavy at module level."""
