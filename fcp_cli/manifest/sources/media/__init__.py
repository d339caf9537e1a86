"""Sources with images and videos."""
