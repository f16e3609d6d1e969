"""Methods: what happens around train steps, such as local updates."""
