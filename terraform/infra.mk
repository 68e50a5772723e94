# The estate's targets; included by the Makefile, whose $(ENV) and $(BIN) they use.

# AWS

.PHONY: init
init: $(ENV) ## Install the AWS provider and connect the state
	@$(BIN)/ies infra init

.PHONY: plan
plan: $(ENV) ## Show what an apply would change in AWS
	@$(BIN)/ies infra plan

.PHONY: apply
apply: $(ENV) ## Plan, ask, and make or change the estate in AWS
	@$(BIN)/ies infra apply

.PHONY: destroy
destroy: $(ENV) ## Remove the estate; refuses while fleets run or logs remain
	@$(BIN)/ies infra destroy

.PHONY: doctor
doctor: $(ENV) ## Say whether this shell can use the estate
	@$(BIN)/ies infra doctor

.PHONY: outputs
outputs: $(ENV) ## The names of everything in the estate
	@$(BIN)/ies infra outputs
