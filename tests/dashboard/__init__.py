"""The chart's dashboard with data: what each panel's query returns from Prometheus, and a picture of all panels."""
