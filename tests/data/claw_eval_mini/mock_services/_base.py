"""What servers share, as in the benchmark: they import it by the checkout's root."""


def add_error_injection(app):
    app.state.injected = True
