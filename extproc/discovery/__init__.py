"""Workers that are found rather than registered: in Kubernetes, or in a file that others write."""
