"""What files hold, as the model would see it, before anything is made of them."""
