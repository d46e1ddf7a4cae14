"""What a layer computes, read off a recording of its forward, and proved before anybody relies on it."""
