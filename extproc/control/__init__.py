"""The control API: workers, readiness, models, information; and the metrics page."""
