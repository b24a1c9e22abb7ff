"""What a user would do: install the chart, apply the quickstart, follow it to the end."""
