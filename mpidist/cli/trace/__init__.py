"""`mpidist trace`: where the time of each rank went, as a report and as a page."""
