"""What steps, plans and stores cost, measured."""
