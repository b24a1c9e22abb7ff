# Makes token files of the text in $TEXT: $DATA/tokenizer, $DATA/train and, at last, $DATA/validation. A run that was
# interrupted is started again, and goes on where it was.
set -eu
pseudoreal() { python -m pseudoreal_trainer.cli.command "$@"; }
cd "$DATA"

# Each piece is a document. The same text has the same pieces, so what is prepared of them is known again.
pieces=${TMPDIR:-/tmp}/pieces
rm -rf "$pieces"
mkdir -p "$pieces/train" "$pieces/validation"
cat "$TEXT"/*.txt >"$pieces/whole"
split --number=l/100 --numeric-suffixes --additional-suffix=.txt "$pieces/whole" "$pieces/train/"
rm "$pieces/whole"
mv "$pieces/train/99.txt" "$pieces/validation"

[ -e tokenizer/tokenizer.json ] ||
  pseudoreal data train-tokenizer "$pieces/train" --output tokenizer --vocabulary-size "$VOCABULARY_SIZE"
for part in train validation; do
  pseudoreal data prepare "$pieces/$part" --output $part --tokenizer tokenizer
done
