"""Right staircase: training and sampling of networks on data sets. Never imports theory."""
