"""Who can do the work: worker records, their registry, health and addresses."""
