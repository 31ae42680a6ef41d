"""Make the automation that notifies of a regression: `python alert.py --webhook URL`.

It makes (or changes) one notification block and one automation on the Prefect server of your settings, and may be
called again at any time. The webhook receives a JSON document with `subject` and `body`, as chat services take it; for
Slack, Teams, e-mail or PagerDuty take Prefect's own notification block in place of the one here.
"""

import argparse
from datetime import timedelta

from prefect.automations import Automation
from prefect.blocks.notifications import CustomWebhookNotificationBlock
from prefect.client.orchestration import get_client
from prefect.events import EventTrigger
from prefect.events.actions import SendNotification
from prefect.events.schemas.automations import Posture

NAME = "perfladder: a workload has become slower"
BLOCK = "perfladder-alert"


def main() -> None:
    """Read the options and make what is asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--webhook", required=True, help="where to send alerts to")
    parser.add_argument("--every-night", action="store_true", help="as long as it lasts, not only the first time")
    options = parser.parse_args()
    print(f"automation {make_alert(options.webhook, every_night=options.every_night)}")


def make_alert(webhook: str, *, every_night: bool = False) -> str:
    """Make block and automation, in place of those of an earlier call; returns the automation's id."""
    block = CustomWebhookNotificationBlock(
        name=BLOCK, url=webhook, json_data={"subject": "{{subject}}", "body": "{{body}}"}
    )
    block_id = block.save(BLOCK, overwrite=True)
    match = {"prefect.resource.id": "perfladder.workload.*"}
    if not every_night:
        match["perfladder.is_new"] = "true"
    automation = Automation(
        name=NAME,
        description="Made by docs/examples/nightly/alert.py",
        trigger=EventTrigger(
            expect={"perfladder.regression"},
            match=match,
            for_each={"prefect.resource.id"},
            posture=Posture.Reactive,
            threshold=1,
            within=timedelta(0),
        ),
        actions=[
            SendNotification(
                block_document_id=block_id,
                subject="{{ event.resource.name }} has become slower",
                body="{{ event.payload.message }}\nRun: {{ event.payload.run_dir }}",
            )
        ],
    )
    with get_client(sync_client=True) as client:
        for earlier in client.read_automations_by_name(NAME):
            client.delete_automation(earlier.id)
    return str(automation.create().id)


if __name__ == "__main__":
    main()
