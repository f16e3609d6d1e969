"""What a run does about signals, lost processes, hangs and steps that come to nothing.

Each module is one idea: :mod:`~jaxtrain.survive.signals` hears SIGTERM and SIGINT,
:mod:`~jaxtrain.survive.lifeline` joins the processes of a run, so that they agree on the step to
stop at and notice when one is gone, :mod:`~jaxtrain.survive.preemption` stops the loop there,
:mod:`~jaxtrain.survive.watchdog` notices a hang, :mod:`~jaxtrain.survive.accidents` steps that were
skipped, and :mod:`~jaxtrain.survive.replay` runs one of them again.
"""
