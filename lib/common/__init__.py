"""Settings, errors, files, the device, progress: any room may use them."""
