#!/usr/bin/env bash
# What somebody does who has never seen this project: clone, install, ingest a folder of their own, ask in LlamaIndex and in LangChain,
# serve, and call with OpenAI's client. Every step says what it does and how long it took; the first wrong result ends it with one sentence.
#
#   tools/newcomer.sh [REPOSITORY]      a path or an address; without one this checkout, as it is committed
#   VENV=.venv tools/newcomer.sh        other people's packages from there (what `make check` installs): two minutes instead of four
#
# Everything happens in a temporary folder; nothing but PyPI is asked for anything.
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
repository=${1:-$here}
others=${VENV:+$(cd "$(dirname "$VENV")" && pwd)/$(basename "$VENV")}
export HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false ANONYMIZED_TELEMETRY=False PYTHONWARNINGS=ignore

work=$(mktemp -d)
server=
finish() {
    if [ -n "$server" ]; then kill "$server" 2>/dev/null && wait "$server" 2>/dev/null; fi || true
    rm -rf "$work"
}
trap finish EXIT

# The last lines of a step, without bars of progress.
printed() {
    sed -e 's/.*\r//' -e 's/^/   /' "$work/step.txt" | grep -v 'it/s\]' | tail -n "$1" || true
}

number=0
step() {
    local name=$1 started=$SECONDS
    shift
    number=$((number + 1))
    echo "== $number. $name"
    echo "   \$ $*"
    # Not in an `if`, which would switch `set -e` off inside.
    (set -e; "$@") >"$work/step.txt" 2>&1 &
    if ! wait $!; then
        printed 30 >&2
        echo "newcomer: step $number ($name) failed: $(tail -n 1 "$work/step.txt")" >&2
        exit 1
    fi
    printed 3
    echo "   $((SECONDS - started)) s"
}

clone() {
    if git -C "$repository" rev-parse --git-dir >/dev/null 2>&1 || [ ! -d "$repository" ]; then
        git clone -q "$repository" "$work/kvcache-rag"
    else # an export without its history
        mkdir "$work/kvcache-rag"
        tar -C "$repository" --exclude='./.venv*' --exclude=./dist --exclude=./build -c . | tar -C "$work/kvcache-rag" -x
    fi
}

from_pypi() {
    make --no-print-directory VENV="$work/venv" demo DEMO="--dir $work/demo --questions 6"
    "$work/venv/bin/pip" --disable-pip-version-check -qq install -c constraints.txt \
        '.[gguf]' ./integrations/kvcache-rag-cpu ./integrations/kvcache-rag-documents ./integrations/kvcache-rag-server ./lab './integrations/llama-index-kvcache-rag[demo]' \
        ./integrations/langchain-kvcache-rag openai
}

from_others() {
    "$others/bin/python" tools/dists.py build "$work/dist"
    "$others/bin/python" tools/dists.py install "$work/dist" "$work/venv"
}

# The notes that somebody has.
write_notes() {
    mkdir notes
    echo "Lake Baikal lies in Siberia. It is the deepest lake in the world." >notes/baikal.md
    echo "The Golden Gate Bridge opened to traffic in 1937. It is painted orange." >notes/bridge.md
    echo "Kilimanjaro is the highest mountain in Africa. It stands in Tanzania." >notes/kilimanjaro.txt
    ls notes
}

ingest_again() {
    kvcache-rag ingest notes --embed hash | tee again.txt
    grep -q "^0 chunks prefilled" again.txt || { echo "ingesting the same folder again prefilled chunks again"; exit 1; }
}

ask() {
    kvcache-rag ask "In which year did the Golden Gate Bridge open to traffic?" | tee answer.txt
    grep -q 1937 answer.txt || { echo "the answer does not say 1937"; exit 1; }
    tail -n 1 answer.txt | grep -q "without the cache), .* tokens reused$" || { echo "it is not said what the cache gained"; exit 1; }
}

llama_index() {
    cat >ask_llama_index.py <<'PYTHON'
import sys

from llama_index.core import VectorStoreIndex
from llama_index.kvcache_rag import HashEmbedding, KVCacheLLM, KVCacheQueryEngine, KVCacheVectorStore

llm = KVCacheLLM(model_name="smollm2", kv_dir="kv")
store = KVCacheVectorStore.from_params("docs", persist_dir="chroma", llm=llm)
index = VectorStoreIndex.from_vector_store(store, embed_model=HashEmbedding())
engine = KVCacheQueryEngine.from_index(index, llm=llm, similarity_top_k=3)
response = engine.query("In which year did the Golden Gate Bridge open to traffic?")
cost = response.metadata["kv_cache"]
print(response)
print(cost["reused_tokens"], "tokens reused,", cost["computed_tokens"], "computed")
if "1937" not in str(response):
    sys.exit(f"the answer does not say 1937: {response}")
if cost["missed"] or not cost["reused_tokens"]:
    sys.exit(f"chunks that were ingested were not reused: {cost}")
PYTHON
    python ask_llama_index.py
}

langchain() {
    cat >ask_langchain.py <<'PYTHON'
import sys

from langchain_core.runnables import RunnablePassthrough
from langchain_kvcache_rag import ChatKVCache, HashEmbeddings, KVCacheChroma, KVCacheRAG

llm = ChatKVCache(model="smollm2", kv_dir="kv")
store = KVCacheChroma("docs", HashEmbeddings(), persist_directory="chroma", llm=llm)
retriever = store.as_retriever(search_kwargs={"k": 3})
chain = {"context": retriever, "question": RunnablePassthrough()} | KVCacheRAG(llm=llm)
message = chain.invoke("In which year did the Golden Gate Bridge open to traffic?")
reused = message.usage_metadata["input_token_details"]["cache_read"]
print(message.text)
print(reused, "tokens reused")
if "1937" not in message.text:
    sys.exit(f"the answer does not say 1937: {message.text}")
if not reused:
    sys.exit("no token of the cached chunks was reused")
PYTHON
    python ask_langchain.py
}

start_server() {
    for _ in $(seq 600); do
        if grep -q "serving smollm2 at" "$work/server.txt"; then
            cat "$work/server.txt"
            return
        fi
        kill -0 "$server" 2>/dev/null || break
        sleep 0.2
    done
    cat "$work/server.txt"
    echo "the server did not come up"
    exit 1
}

call() {
    cat >call.py <<'PYTHON'
import sys
from pathlib import Path

from openai import OpenAI

client = OpenAI(base_url=f"http://127.0.0.1:{sys.argv[1]}/v1", api_key="none")


answer = client.chat.completions.create(
    model="smollm2",
    messages=[{"role": "user", "content": "In which year did the Golden Gate Bridge open to traffic?"}],
    extra_body={"documents": [path.read_text().strip() for path in sorted(Path("notes").iterdir())]},
    temperature=0,
    max_tokens=32,
)
text, cached = answer.choices[0].message.content, answer.usage.prompt_tokens_details.cached_tokens
print(text)
print(cached, "tokens cached")
if "1937" not in text:
    sys.exit(f"the answer does not say 1937: {text}")
if not cached:
    sys.exit("the server did not find the chunks that were ingested")
PYTHON
    python call.py "$port"
}

step "Clone" clone
cd "$work/kvcache-rag"
if [ -n "$others" ]; then
    step "Build the packages and install them beside what $(basename "$others") has" from_others
else
    step "Install, and run the demo (some minutes)" from_pypi
fi
export PATH="$work/venv/bin:$PATH"
mkdir "$work/app" && cd "$work/app"
step "Write three notes" write_notes
step "Embed, store and prefill them" kvcache-rag ingest notes --embed hash
step "Do it again: nothing is left to do" ingest_again
step "Ask in the terminal" ask
step "Ask in LlamaIndex" llama_index
step "Ask in LangChain, over the same chunks" langchain
port=$(python -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])')
: >"$work/server.txt"
kvcache-rag serve smollm2 --kv-dir kv --port "$port" >"$work/server.txt" 2>&1 &
server=$!
step "Serve the model over them: kvcache-rag serve smollm2 --kv-dir kv --port $port" start_server
step "Call the server with OpenAI's client" call
echo "== All of it works, in $SECONDS s"
