// An agent of Strands' TypeScript SDK with the SDK's own tools: node strands_agent.mjs API PROMPT [PROMPT ...]
import { Agent } from '@strands-agents/sdk'
import { AnthropicModel } from '@strands-agents/sdk/models/anthropic'
import { OpenAIModel } from '@strands-agents/sdk/models/openai'
import { bash } from '@strands-agents/sdk/vended-tools/bash'
import { fileEditor } from '@strands-agents/sdk/vended-tools/file-editor'

const [api, ...prompts] = process.argv.slice(2)
const modelId = process.env.OPENAI_MODEL
const models = {
  chat: () => new OpenAIModel({ api: 'chat', modelId }),
  responses: () => new OpenAIModel({ modelId }),
  responses_by_id: () => new OpenAIModel({ modelId, stateful: true }),
  messages: () => new AnthropicModel({ modelId, maxTokens: 4096 }),
}
const agent = new Agent({ model: models[api](), tools: [bash, fileEditor], printer: false })
for (const prompt of prompts) await agent.invoke(prompt)
process.exit(0) // the shell of the tool bash would keep this process alive
