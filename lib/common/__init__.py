"""What every room may use: settings, errors, files, the device, progress."""
