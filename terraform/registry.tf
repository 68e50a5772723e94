# The worker image for Batch. Tags never move and a tagged image never expires, so what a job definition uses stays.

resource "aws_ecr_repository" "worker" {
  #checkov:skip=CKV_AWS_136:ECR encrypts by itself at no cost; the image holds no secret.
  name                 = "${local.prefix}-worker"
  image_tag_mutability = "IMMUTABLE"
  force_delete         = true # with its images, which `make push-image` can make again: a destroy would fail at the first one

  image_scanning_configuration {
    scan_on_push = true
  }
}

resource "aws_ecr_lifecycle_policy" "worker" {
  repository = aws_ecr_repository.worker.name

  policy = jsonencode({
    rules = [{
      rulePriority = 1
      description  = "Only what has no tag: left by an interrupted push. Parts of a tagged index are kept by ECR itself."
      selection    = { tagStatus = "untagged", countType = "sinceImagePushed", countUnit = "days", countNumber = 14 }
      action       = { type = "expire" }
    }]
  })
}
