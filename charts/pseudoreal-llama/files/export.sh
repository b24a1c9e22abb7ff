# Waits in $CHECKPOINTS for $CHECKPOINT, the last one of $JOB, and writes it to $DATA/export for transformers, with the
# tokenizer that the job keeps beside its checkpoints.
set -eu
cd "$DATA"
[ ! -e export ] || exit 0
echo "waiting for $CHECKPOINT of $JOB"
# The job's folder ends with eight characters of its uid; of a job that was made anew, the newest counts. A checkpoint is
# whole when it has a manifest.
manifest=
while [ -z "$manifest" ]; do
  manifest=$(ls -t "$CHECKPOINTS/$JOB"-????????/checkpoints/"$CHECKPOINT"/manifest.json 2>/dev/null | head -n 1)
  [ -n "$manifest" ] || sleep 5
done
# What a try that was interrupted has left is not whole.
rm -rf export.part
python -m pseudoreal_trainer.cli.command export "$(dirname "$manifest")" \
  --format huggingface --output export.part
mv export.part export
ls -l export
