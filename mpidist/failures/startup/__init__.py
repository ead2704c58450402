"""The start of a job, when ranks are not connected yet: the search for ranks that have not arrived, and its report."""
