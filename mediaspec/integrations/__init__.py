"""Where mediaspec meets other libraries. The two underscore modules are the only files that know versions."""
