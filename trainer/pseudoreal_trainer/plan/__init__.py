"""What a step does, as data: units and their places, orders, the step plan, its checker, its prediction. No torch."""
