"""look(): a page that is served from this process, and the verb `clearhead look`."""

from serving import Served


def test_a_served_model_answers_at_its_url(served: Served) -> None:
    """The page is there, and so is the manifest."""
    assert served.client.get("/").status_code == 200
    assert served.client.get("/api/model").json()["name"] == "tiny decoder"
