# Waits in $CHECKPOINTS for $CHECKPOINT, the last one of $JOB, and writes it to $DATA/export for transformers, with the
# tokenizer that the job keeps beside its checkpoints.
set -eu
cd "$DATA"
[ ! -e export ] || exit 0
echo "waiting for $CHECKPOINT of $JOB"
# The job's folder ends with eight characters of its uid. A checkpoint is whole when it has a manifest.
until manifest=$(ls "$CHECKPOINTS/$JOB"-????????/checkpoints/"$CHECKPOINT"/manifest.json 2>/dev/null); do sleep 5; done
# What a try that was interrupted has left is not whole.
rm -rf export.part
python -m pseudoreal_trainer.cli.command export "$(dirname "$manifest")" \
  --format huggingface --output export.part
mv export.part export
ls -l export
