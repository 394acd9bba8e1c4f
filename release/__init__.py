"""What a release is made of beside the wheel and the chart: the plugin of kubectl, for krew."""
