output "urls" {
  description = "The queues' URLs, as a lane's record holds them."
  value = {
    jobs   = aws_sqs_queue.jobs.url
    events = aws_sqs_queue.events.url
    dead   = aws_sqs_queue.dead.url
  }
}
