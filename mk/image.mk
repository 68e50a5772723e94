# The worker AMI and the worker image. Included by the Makefile.

BASE ?= debian:trixie-slim#                    # the Debian 13 image that `make image` builds on
KEEP ?= 3#                                     # how many AMIs `make clean-amis` keeps

.PHONY: ami
ami: $(ENV) ## Build the worker AMI and let workers boot it; ARGS="--tasks … --images FILE"
	$(BIN)/ct cloud build-ami $(ARGS)

.PHONY: clean-amis
clean-amis: $(ENV) ## Remove old worker AMIs and what killed builds have left
	$(BIN)/ct cloud clean-amis --keep $(KEEP)

.PHONY: image
image: $(ENV) ## Build the worker image (Docker in Docker)
	$(BIN)/ct cloud build-image --base $(BASE)

.PHONY: push-image
push-image: $(ENV) ## Push the worker image to the estate's registry, for Batch
	$(BIN)/ct cloud push-image

.PHONY: shell-image
shell-image: ## A shell in the worker image, with this folder and your AWS credentials (read-only)
	docker run --rm --interactive $(if $(MAKE_TERMOUT),--tty) --privileged \
		--volume "$(CURDIR):/work" $(if $(wildcard $(HOME)/.aws),--volume "$(HOME)/.aws:/root/.aws:ro") \
		$(if $(wildcard .env),--env-file .env) $(foreach name,AWS_PROFILE AWS_DEFAULT_REGION S3_BUCKET_NAME,--env $(name)) \
		inspect-fleet-worker:latest bash
