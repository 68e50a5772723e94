"""What EC2 is asked for, and what its answers mean: botocore's own request and answer models, no emulator."""

from typing import Any

import botocore.session
import pytest
from botocore.exceptions import EndpointConnectionError, ReadTimeoutError
from botocore.stub import ANY, Stubber

from evalops.ec2 import capacity, preflight
from evalops.ec2.capacity import Instance, Source
from evalops.ui import Failure
from evalworker.aws import ServiceError

SOURCE = Source(
    templates={"x86_64": "lt-1", "arm64": "lt-2"},
    instance_types={"x86_64": ["m7i.large", "m6i.large"], "arm64": ["m7g.large"]},
    subnets=["subnet-1", "subnet-2"],
    images={"x86_64": "ami-1"},
)
TAGS = {"fleet-id": "f", "owner": "ann"}


def client(service: str) -> Any:
    return botocore.session.Session().create_client(
        service, region_name="us-east-1", aws_access_key_id="a", aws_secret_access_key="b"
    )


def test_a_request_names_every_type_in_every_subnet() -> None:
    asked = capacity.request(SOURCE, 3, "spot", TAGS, "token")
    first, second = asked["LaunchTemplateConfigs"]
    assert first["LaunchTemplateSpecification"] == {"LaunchTemplateId": "lt-1", "Version": "$Default"}
    assert first["Overrides"] == [
        {"InstanceType": type_, "SubnetId": subnet, "ImageId": "ami-1"}
        for type_ in ("m7i.large", "m6i.large")
        for subnet in ("subnet-1", "subnet-2")
    ]
    assert second["Overrides"][0] == {"InstanceType": "m7g.large", "SubnetId": "subnet-1"}
    assert asked["TargetCapacitySpecification"] == {"TotalTargetCapacity": 3, "DefaultTargetCapacityType": "spot"}
    assert (asked["Type"], asked["ClientToken"]) == ("instant", "token")
    (tags,) = asked["TagSpecifications"]
    assert tags == {
        "ResourceType": "instance",
        "Tags": [{"Key": "fleet-id", "Value": "f"}, {"Key": "owner", "Value": "ann"}],
    }


def test_the_overrides_of_all_templates_stay_within_the_limit() -> None:
    wide = Source(
        templates={"x86_64": "lt-1", "arm64": "lt-2"},
        instance_types={"x86_64": [f"m{n}.large" for n in range(40)], "arm64": ["m7g.large"]},
        subnets=[f"subnet-{n}" for n in range(8)],
    )
    asked = capacity.request(wide, 1, "on-demand", TAGS, "t")
    assert sum(len(each["Overrides"]) for each in asked["LaunchTemplateConfigs"]) == capacity.MAX_OVERRIDES


def launch(answer: dict[str, Any] | None = None, market: Any = "spot", **error: Any) -> capacity.Launched:
    ec2 = client("ec2")
    with Stubber(ec2) as stub:
        if answer is not None:
            stub.add_response(
                "create_fleet", answer, dict.fromkeys(capacity.request(SOURCE, 4, market, TAGS, "t"), ANY)
            )
        else:
            stub.add_client_error("create_fleet", **error)
        return capacity.launch(ec2, SOURCE, 4, market, TAGS, "t")


def test_instances_and_errors_come_in_one_answer() -> None:
    found = launch(
        {
            "Instances": [
                {"InstanceIds": ["i-1", "i-2"], "InstanceType": "m7i.large", "Lifecycle": "spot"},
                {"InstanceIds": ["i-3"], "InstanceType": "m6i.large", "Lifecycle": "spot"},
            ],
            "Errors": [
                {"ErrorCode": "InsufficientInstanceCapacity", "ErrorMessage": "none of m7i in a"},
                {"ErrorCode": "InsufficientInstanceCapacity", "ErrorMessage": "none of m7i in b"},
                {"ErrorCode": "InsufficientInstanceCapacity", "ErrorMessage": "Request limit exceeded."},
                {"ErrorCode": "InvalidLaunchTemplateId.NotFound", "ErrorMessage": "lt-2"},
            ],
        }
    )
    assert found.instances == [
        Instance("i-1", "m7i.large", "spot"),
        Instance("i-2", "m7i.large", "spot"),
        Instance("i-3", "m6i.large", "spot"),
    ]
    assert sorted(error.code for error in found.retryable) == ["InsufficientInstanceCapacity", "RequestLimitExceeded"]
    assert [error.sentence for error in found.final] == ["the launch template is gone: run `make apply`"]


@pytest.mark.parametrize(
    ("code", "message", "market", "retryable", "said"),
    [
        ("VcpuLimitExceeded", "your current vCPU limit of 32 allows", "on-demand", False,
         "the quota Running On-Demand Standard instances (L-1216C47A) is 32 vCPUs: 4 more on-demand workers do not fit"),
        ("MaxSpotInstanceCountExceeded", "Max spot instance count exceeded", "spot", True,
         "the quota All Standard Spot Instance Requests (L-34B43A08) is used up: 4 more spot workers do not fit"),
        ("UnfulfillableCapacity", "no", "spot", True, "EC2 has no spot capacity"),
        ("PendingVerification", "wait", "spot", False, "this AWS account may not launch instances yet"),
        ("Blocked", "blocked", "spot", False, "this AWS account may not launch instances yet"),
        ("InvalidAMIID.NotFound", "ami-1", "spot", False, "the worker image is gone: choose another with --ami"),
        ("RequestLimitExceeded", "slow", "spot", True, "EC2 throttles this account's calls"),
        ("UnauthorizedOperation", "You are not", "spot", False, "these credentials may not launch workers: You are not"),
        ("SomethingNew", "oh", "spot", False, "EC2 answered SomethingNew: oh"),
    ],
)  # fmt: skip
def test_an_error_of_the_call_is_plain_words(code: str, message: str, market: Any, retryable: bool, said: str) -> None:
    found = launch(None, market, service_error_code=code, service_message=message)
    (error,) = found.retryable if retryable else found.final
    assert error.sentence.startswith(said)
    assert (found.instances, found.unclear) == ([], False)


def test_expired_credentials_are_not_an_answer_of_ec2() -> None:
    with pytest.raises(ServiceError) as raised:
        launch(None, service_error_code="ExpiredToken", service_message="expired", http_status_code=403)
    assert raised.value.credentials


def test_no_answer_leaves_open_whether_something_was_launched(monkeypatch: pytest.MonkeyPatch) -> None:
    class Silent:
        def create_fleet(self, **_: Any) -> None:
            raise ReadTimeoutError(endpoint_url="https://ec2")

    found = capacity.launch(Silent(), SOURCE, 1, "spot", TAGS, "t")
    assert found.unclear
    assert [error.retryable for error in found.retryable] == [True]


@pytest.mark.parametrize(
    ("code", "status", "retries", "unclear"),
    [
        ("InternalFailure", 500, 0, True),
        ("InternalError", 500, 0, True),
        ("RequestThrottled", 429, 1, True),
        ("RequestThrottled", 429, 0, False),
        ("InsufficientInstanceCapacity", 500, 0, False),
    ],
)
def test_an_error_of_the_service_may_hide_instances_and_is_not_the_end(
    code: str, status: int, retries: int, unclear: bool
) -> None:
    found = launch(None, service_error_code=code, http_status_code=status, response_meta={"RetryAttempts": retries})
    assert ([error.code for error in found.retryable], found.final, found.unclear) == ([code], [], unclear)


def test_an_encoded_denial_is_decoded() -> None:
    sts = client("sts")
    sentence = "these credentials may not launch workers: no. Encoded authorization failure message: abc"
    decoded = '{"allowed":false,"context":{"action":"ec2:RunInstances","resource":"arn:aws:ec2:::subnet/s-1"}}'
    with Stubber(sts) as stub:
        stub.add_response("decode_authorization_message", {"DecodedMessage": decoded}, {"EncodedMessage": "abc"})
        assert capacity.decode_denial(sts, sentence) == "ec2:RunInstances on arn:aws:ec2:::subnet/s-1 is not allowed"
    with Stubber(sts) as stub:
        stub.add_client_error("decode_authorization_message", "AccessDenied")
        assert capacity.decode_denial(sts, sentence) == "these credentials may not launch workers: no."
    assert capacity.decode_denial(sts, "plain") == "plain"


def test_a_network_that_fails_during_the_preflight_is_a_sentence() -> None:
    class Away:
        def __getattr__(self, name: str) -> Any:
            raise EndpointConnectionError(endpoint_url="https://ec2")

    with pytest.raises(Failure, match="the instance types cannot be looked at: Could not connect"):
        preflight._vcpu_entries(Away(), ("m5.large",))
    with pytest.raises(Failure, match="the image ami-1 cannot be looked at: Could not connect"):
        preflight._described(Away(), ["ami-1"])


@pytest.mark.parametrize(
    ("market", "name", "code"),
    [
        ("spot", "m7i.large", "L-34B43A08"),
        ("on-demand", "is4gen.large", "L-1216C47A"),
        ("on-demand", "g5.xlarge", "L-DB2E81BA"),
        ("spot", "inf2.xlarge", "L-B5D1601B"),
        ("spot", "p4d.24xlarge", "L-7212CCBC"),
        ("spot", "p5.48xlarge", None),
        ("on-demand", "p5.48xlarge", "L-417A185B"),
        ("spot", "x2idn.16xlarge", "L-E3A00192"),
        ("spot", "trn1.2xlarge", None),
    ],
)
def test_each_instance_type_counts_against_its_own_quota(market: Any, name: str, code: str | None) -> None:
    found = capacity.quota_of(market, name)
    assert (found and found[1]) == code


def test_a_quota_that_is_used_up_is_named_by_the_type_that_met_it() -> None:
    template = {"LaunchTemplateSpecification": {"LaunchTemplateId": "lt-1"}, "Overrides": {"InstanceType": "g5.xlarge"}}
    error = {"ErrorCode": "VcpuLimitExceeded", "ErrorMessage": "limit of 8", "LaunchTemplateAndOverrides": template}
    (found,) = launch({"Errors": [error], "Instances": []}, "on-demand").final
    assert found.sentence.startswith("the quota Running On-Demand G and VT instances (L-DB2E81BA) is 8 vCPUs: 4 more")
