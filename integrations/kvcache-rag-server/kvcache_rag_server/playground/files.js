// Files of text as documents; each is cut into chunks.

const LONGEST = 1200; // characters of a chunk, some 300 tokens
const PARAGRAPH = /\n\s*\n/;
const SENTENCE = /(?<=[.!?。！？])\s+/;
const WORD = /\s+/;

const megabytes = (bytes) => `${(bytes / 2 ** 20).toFixed(1)} MiB`;

// Texts of the chunks of a file; refused in one sentence.
export async function chunksOf(file, mostBytes) {
  if (!/\.(txt|md)$/i.test(file.name)) throw new Error(`${file.name} is no .txt or .md file; save its text as one.`);
  if (file.size > mostBytes) {
    throw new Error(`${file.name} has ${megabytes(file.size)}, and a file may have ${megabytes(mostBytes)}; give a part of it.`);
  }
  const chunks = cut(await plainText(file));
  if (!chunks.length) throw new Error(`${file.name} has no text in it.`);
  return chunks;
}

async function plainText(file) {
  const bytes = await file.arrayBuffer().catch(() => {
    throw new Error(`${file.name} cannot be read; is it still there?`);
  });
  try {
    return new TextDecoder("utf-8", { fatal: true }).decode(bytes);
  } catch {
    throw new Error(`${file.name} is not written in UTF-8; save it as UTF-8 and add it again.`);
  }
}

// Paragraphs packed into chunks; one that is too long is cut at sentences, else at words.
export function cut(text) {
  const paragraphs = text.replaceAll("\r\n", "\n").split(PARAGRAPH);
  return pack(paragraphs, "\n\n", (paragraph) =>
    pack(paragraph.split(SENTENCE), " ", (sentence) => pack(sentence.split(WORD), " ", pieces)),
  );
}

const pieces = (word) => word.match(new RegExp(`.{1,${LONGEST}}`, "gsu")) ?? [];

// Parts joined as long as they fit; `smaller` cuts one that does not fit by itself.
function pack(parts, glue, smaller) {
  const packed = [];
  for (const part of parts.map((one) => one.trim()).filter(Boolean)) {
    const last = packed.at(-1);
    if (part.length > LONGEST) packed.push(...smaller(part));
    else if (last !== undefined && last.length + glue.length + part.length <= LONGEST) {
      packed[packed.length - 1] = last + glue + part;
    } else packed.push(part);
  }
  return packed;
}
