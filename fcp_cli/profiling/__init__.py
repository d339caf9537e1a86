"""Where coefficients come from: model and cluster figures, analysis, measurement on this machine, real runs."""
