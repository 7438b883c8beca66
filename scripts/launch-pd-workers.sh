#!/usr/bin/env bash
# Start prefill and decode workers on this machine, and say how the gateway gets to know them. Bash 4.4 or newer.
set -euo pipefail

usage() {
  cat <<'END'
usage: launch-pd-workers.sh [--dry-run] [--grpc] vllm|sglang|tokenspeed MODEL [-- ENGINE ARGUMENT ...]

Starts prefill and decode workers on this machine, waits until they serve, and prints the gateway's command line and the
registrations that fit. When one of them ends, the others are ended too; so they are on Ctrl-C and TERM.

  --dry-run   print the commands and start nothing
  --grpc      the engine's gRPC server in place of HTTP (GRPC=1; TokenSpeed has no other)

environment:
  KV_BACKEND        nixl or mooncake [default: nixl for vLLM, mooncake for the others; TokenSpeed: mooncake only]
  PREFILL_WORKERS, DECODE_WORKERS   how many [default: 1, 1]
  TP_SIZE           tensor parallel size of every worker [default: 1]
  DP_SIZE           data parallel size of every worker, vLLM only [default: 1]
  PREFILL_GPUS, DECODE_GPUS         ids such as 0,1,2,3: each worker takes the next TP_SIZE x DP_SIZE of them;
                    none: set no CUDA_VISIBLE_DEVICES [default: the first that the other list does not name, of the
                    CUDA_VISIBLE_DEVICES that this script is given (empty or -1: as none), without one of 0,1,2,...]
  HOST              address that the workers listen on [default: 0.0.0.0]
  ADVERTISE_HOST    their address for the gateway and for each other [default: HOST, or 127.0.0.1 if that is a wildcard]
  PREFILL_PORT      of the first prefill worker; the next one's is 1 higher, SGLang's 10: it takes ports beside its own
                    [default: 8000; gRPC 50051; TokenSpeed 50061]
  DECODE_PORT       of the first decode worker [default: the one after the last prefill worker's]
  SIDE_CHANNEL_PORT vLLM with NIXL: of the first worker; the next one's is DP_SIZE higher [default: 5600]
  BOOTSTRAP_PORT    vLLM with Mooncake, SGLang, TokenSpeed: of the first prefill worker; then 1 higher [default: 8998]
  GATEWAY_PORT      the gateway's port in what is printed [default: 30000]
  KV_EXTRA_CONFIG   vLLM: JSON object with more of --kv-transfer-config, such as
                    {"kv_connector_extra_config":{"mooncake_protocol":"tcp"}} for Mooncake without RDMA
  LOG_DIR           directory of the workers' logs [default: a new one]
  READY_SECONDS     how long loading may take [default: 1800]
  STOP_SECONDS      how long the workers may take to end, before they are killed [default: 30]
  PYTHON            the interpreter of the engine's Python commands [default: python3]

exit codes: 1 a worker ended or could not start, 2 wrong usage; 129, 130, 143 ended by HUP, INT, TERM
END
}

complain() { printf '%s: error: %s\n' "${0##*/}" "$1" >&2; }

# fail MESSAGE [CODE]: 2, the default, for wrong usage.
fail() {
  complain "$1"
  exit "${2:-2}"
}

# number NAME LEAST MOST: the variable of that name must hold a whole number in that range.
number() {
  if ! [[ ${!1} =~ ^(0|[1-9][0-9]{0,5})$ ]] || ((${!1} < $2 || ${!1} > $3)); then
    fail "$1=${!1}: expected a whole number from $2 to $3"
  fi
}

# ---- What is asked for

read_arguments() {
  engine='' model='' dry_run='' extra=()
  local -a words=()
  while (($#)); do
    case $1 in
      --dry-run) dry_run=1 ;;
      --grpc) GRPC=1 ;;
      -h | --help) usage && exit ;;
      --) shift && extra=("$@") && break ;;
      -*) fail "unknown option $1; arguments of the engine go behind --" ;;
      *) words+=("$1") ;;
    esac
    shift
  done
  ((${#words[@]} == 2)) || fail "expected an engine and a model, got ${#words[@]} words; see --help"
  engine=${words[0]} model=${words[1]}
  [[ $engine =~ ^(vllm|sglang|tokenspeed)$ ]] || fail "unknown engine $engine: expected vllm, sglang or tokenspeed"
  [[ -n $model ]] || fail "the model is empty"
  refuse_own_arguments
}

# What this script gives must not be given twice: the engines take the last one, and the printed lines would not fit.
refuse_own_arguments() {
  local argument name
  for argument in "${extra[@]}"; do
    name=${argument%%=*}
    case ${name//_/-} in
      --host | --port | --model | --model-path | --grpc | --grpc-mode | --smg-grpc-mode | --smg-http-sidecar-port | \
        --kv-transfer-config | --disaggregation-mode | --disaggregation-bootstrap-port | \
        --disaggregation-transfer-backend | --tensor-parallel-size | --tp-size | --tp | -tp | --world-size)
        fail "$name is given by this script; see --help for the variable that sets it"
        ;;
      --data-parallel-size | -dp) [[ $engine != vllm ]] || fail "$name is given by this script: set DP_SIZE" ;;
    esac
  done
}

read_environment() {
  case ${GRPC:-0} in
    0) scheme=http ;;
    1) scheme=grpc ;;
    *) fail "GRPC=$GRPC: expected 0 or 1" ;;
  esac
  local first=8000 backend=mooncake
  [[ $engine != tokenspeed ]] || scheme=grpc
  [[ $engine != vllm ]] || backend=nixl
  [[ $scheme != grpc ]] || first=50051
  [[ $engine != tokenspeed ]] || first=50061
  step=1
  [[ $engine != sglang ]] || step=10
  : "${KV_BACKEND:=$backend}" "${PREFILL_WORKERS:=1}" "${DECODE_WORKERS:=1}" "${TP_SIZE:=1}" "${DP_SIZE:=1}"
  : "${PREFILL_GPUS:=}" "${DECODE_GPUS:=}" "${KV_EXTRA_CONFIG:=}" "${PYTHON:=python3}"
  : "${BOOTSTRAP_PORT:=8998}" "${SIDE_CHANNEL_PORT:=5600}" "${GATEWAY_PORT:=30000}" "${PREFILL_PORT:=$first}"
  : "${READY_SECONDS:=1800}" "${STOP_SECONDS:=30}"
  number PREFILL_WORKERS 1 1000
  number DECODE_WORKERS 1 1000
  number TP_SIZE 1 1000
  number DP_SIZE 1 1000
  number READY_SECONDS 1 100000
  number STOP_SECONDS 0 100000
  number PREFILL_PORT 1 65535
  : "${DECODE_PORT:=$((PREFILL_PORT + PREFILL_WORKERS * step))}"
  local name
  for name in DECODE_PORT BOOTSTRAP_PORT SIDE_CHANNEL_PORT GATEWAY_PORT; do number "$name" 1 65535; done
  check_backend
  read_hosts
}

check_backend() {
  [[ $KV_BACKEND =~ ^(nixl|mooncake)$ ]] || fail "KV_BACKEND=$KV_BACKEND: expected nixl or mooncake"
  [[ $engine != tokenspeed || $KV_BACKEND == mooncake ]] ||
    fail "KV_BACKEND=$KV_BACKEND: TokenSpeed moves the KV cache with mooncake only"
  [[ $engine == vllm || $DP_SIZE == 1 ]] || fail "DP_SIZE is for vllm; give $engine its own arguments behind --"
  connector=NixlConnector
  [[ $KV_BACKEND == nixl ]] || connector=MooncakeConnector
  [[ -n $KV_EXTRA_CONFIG ]] || return 0
  [[ $engine == vllm ]] || fail "KV_EXTRA_CONFIG is for vllm"
  [[ $KV_EXTRA_CONFIG =~ ^[[:space:]]*\{(.*[^[:space:]].*)\}[[:space:]]*$ ]] ||
    fail "KV_EXTRA_CONFIG: expected a JSON object with something in it"
  extra_members=,${BASH_REMATCH[1]}
  [[ ! $KV_EXTRA_CONFIG =~ \"(kv_connector|kv_role|engine_id)\"[[:space:]]*: ]] ||
    fail "KV_EXTRA_CONFIG: ${BASH_REMATCH[1]} is given by this script"
}

read_hosts() {
  : "${HOST:=0.0.0.0}"
  probe_host=$HOST
  [[ $HOST != 0.0.0.0 ]] || probe_host=127.0.0.1
  [[ $HOST != :: ]] || probe_host=::1
  : "${ADVERTISE_HOST:=$probe_host}"
  local name
  for name in HOST ADVERTISE_HOST; do
    [[ ${!name} =~ ^[A-Za-z0-9._:-]+$ ]] ||
      fail "$name=${!name}: expected a host name or an IP address without brackets"
  done
  url_host=$ADVERTISE_HOST
  [[ $url_host != *:* ]] || url_host="[$url_host]"
}

# ---- The plan: one entry a worker in each of these

names=() roles=() ports=() gpus=() bootstrap_ports=() side_channel_ports=() engine_ids=()
declare -A claimed=() gpu_of=()
extra_members=''

plan() {
  # A new id at every start. Decode workers keep what they know of a Mooncake engine by its id: behind a prefill worker
  # that came back with its old one, every handoff to them hangs (seen with vLLM 0.32).
  printf -v start '%(%s)T-%04x' -1 "$RANDOM"
  local -a taken=() prefill_gpus=()
  claim "$GATEWAY_PORT" "the gateway"
  take_gpus PREFILL_GPUS "$PREFILL_WORKERS" "$DECODE_GPUS"
  prefill_gpus=("${taken[@]}")
  plan_role prefill "$PREFILL_WORKERS" "$PREFILL_PORT"
  take_gpus DECODE_GPUS "$DECODE_WORKERS" "$(IFS=, && echo "${prefill_gpus[*]}")"
  plan_role decode "$DECODE_WORKERS" "$DECODE_PORT"
}

# take_gpus NAME WORKERS OTHERS: the ids in the variable NAME, or the first that OTHERS does not name, into $taken.
take_gpus() {
  local needed=$(($2 * TP_SIZE * DP_SIZE)) id list=$1 more=''
  local -a offered=()
  taken=()
  [[ ${!1} != none ]] || return 0
  if [[ -n ${!1} ]]; then
    IFS=, read -ra taken <<<"${!1}"
  elif [[ -n ${CUDA_VISIBLE_DEVICES+given} ]]; then # on a shared machine the other GPUs are somebody else's
    [[ ! $CUDA_VISIBLE_DEVICES =~ ^(-1)?$ ]] || return 0
    list=CUDA_VISIBLE_DEVICES more=" beside the other role's; or set $1"
    IFS=, read -ra offered <<<"$CUDA_VISIBLE_DEVICES"
    for id in "${offered[@]}"; do [[ ,$3, == *,$id,* ]] || ((${#taken[@]} == needed)) || taken+=("$id"); done
  else
    for ((id = 0; ${#taken[@]} < needed; id++)); do [[ ,$3, == *,$id,* ]] || taken+=("$id"); done
  fi
  for id in "${taken[@]}"; do [[ $id =~ ^[A-Za-z0-9/-]+$ ]] || fail "$list=${!list}: '$id' is no GPU id"; done
  ((${#taken[@]} == needed)) || fail "$list=${!list}: ${#taken[@]} GPU ids for $2 worker(s) with TP_SIZE=$TP_SIZE and \
DP_SIZE=$DP_SIZE: $needed needed$more"
}

# plan_role ROLE WORKERS PORT: with the GPUs in $taken.
plan_role() {
  local size=$((TP_SIZE * DP_SIZE)) number name
  for ((number = 0; number < $2; number++)); do
    name=$1-$number
    names+=("$name")
    roles+=("$1")
    ports+=("$(($3 + number * step))")
    gpus+=("$(IFS=, && echo "${taken[*]:number*size:size}")")
    engine_ids+=("$name-$start")
    claim "${ports[-1]}" "$name"
    note_gpus "$name" "${taken[@]:number*size:size}"
    plan_more_ports "$name" "$1" "$number"
  done
}

# note_gpus NAME GPU...: a GPU for two workers is possible with little memory each, but hardly meant.
note_gpus() {
  local name=$1 id
  for id in "${@:2}"; do
    [[ -z ${gpu_of[$id]:-} ]] || printf '%s: warning: %s\n' "${0##*/}" "${gpu_of[$id]} and $name share GPU $id" >&2
    gpu_of[$id]=$name
  done
}

# plan_more_ports NAME ROLE NUMBER: of the worker planned last.
plan_more_ports() {
  local port='' rank
  if [[ $engine == vllm && $KV_BACKEND == nixl ]]; then
    port=$((SIDE_CHANNEL_PORT + (${#names[@]} - 1) * DP_SIZE))
    # vLLM adds the data parallel rank.
    for ((rank = 0; rank < DP_SIZE; rank++)); do claim $((port + rank)) "the side channel of $1"; done
  fi
  side_channel_ports+=("$port")
  port=''
  if [[ $2 == prefill && ($engine != vllm || $KV_BACKEND == mooncake) ]]; then
    port=$((BOOTSTRAP_PORT + $3))
    claim "$port" "the bootstrap server of $1"
  fi
  bootstrap_ports+=("$port")
  if [[ $engine == sglang && $scheme == grpc ]]; then
    claim $((ports[-1] + 1)) "the HTTP sidecar of $1"
    # SGLang 0.5.23 derives a port for its other gRPC server, and checks it.
    ((ports[-1] + 10000 <= 65535)) || fail "$1: SGLang wants port ${ports[-1]} + 10000 with gRPC: that is above 65535"
  fi
}

# claim PORT WHO
claim() {
  (($1 <= 65535)) || fail "port $1 for $2: above 65535"
  [[ -z ${claimed[$1]:-} ]] || fail "port $1 is both ${claimed[$1]}'s and $2's"
  claimed[$1]=$2
}

# ---- Commands

# compose WORKER: what starts it, in $environment and $command.
compose() {
  environment=() command=()
  [[ -z ${gpus[$1]} ]] || environment+=("CUDA_VISIBLE_DEVICES=${gpus[$1]}")
  "compose_$engine" "$1"
  command+=("${extra[@]}")
}

compose_vllm() {
  local role=kv_producer
  [[ ${roles[$1]} == prefill ]] || role=kv_consumer
  if [[ $KV_BACKEND == nixl ]]; then
    environment+=("VLLM_NIXL_SIDE_CHANNEL_HOST=$ADVERTISE_HOST" "VLLM_NIXL_SIDE_CHANNEL_PORT=${side_channel_ports[$1]}")
  elif [[ -n ${bootstrap_ports[$1]} ]]; then
    environment+=("VLLM_MOONCAKE_BOOTSTRAP_PORT=${bootstrap_ports[$1]}")
  fi
  command=(vllm serve "$model")
  [[ $scheme == http ]] || command+=(--grpc)
  command+=(--host "$HOST" --port "${ports[$1]}")
  ((TP_SIZE == 1)) || command+=(--tensor-parallel-size "$TP_SIZE")
  ((DP_SIZE == 1)) || command+=(--data-parallel-size "$DP_SIZE")
  command+=(--kv-transfer-config)
  command+=("{\"kv_connector\":\"$connector\",\"kv_role\":\"$role\",\"engine_id\":\"${engine_ids[$1]}\"$extra_members}")
}

compose_sglang() {
  command=("$PYTHON" -m sglang.launch_server --model-path "$model" --host "$HOST" --port "${ports[$1]}")
  [[ $scheme == http ]] || command+=(--smg-grpc-mode)
  ((TP_SIZE == 1)) || command+=(--tp-size "$TP_SIZE")
  add_disaggregation "$1"
}

compose_tokenspeed() {
  command=("$PYTHON" -m smg_grpc_servicer.tokenspeed --model "$model" --host "$HOST" --port "${ports[$1]}")
  ((TP_SIZE == 1)) || command+=(--world-size "$TP_SIZE")
  add_disaggregation "$1"
}

add_disaggregation() {
  command+=(--disaggregation-mode "${roles[$1]}")
  [[ -z ${bootstrap_ports[$1]} ]] || command+=(--disaggregation-bootstrap-port "${bootstrap_ports[$1]}")
  command+=(--disaggregation-transfer-backend "$KV_BACKEND")
}

# show WORD...: a command as one would type it, an option a line.
show() {
  local word text=''
  for word; do
    [[ $word =~ ^[A-Za-z0-9_./:=,@%+-]+$ ]] || word=${word@Q}
    if [[ $word == --* ]]; then text+=$' \\\n  '; else text+=' '; fi
    text+=$word
  done
  printf '%s\n' "${text# }"
}

# Sets url. Once signals are trapped nothing here is a "$(...)": Bash 5.2 takes a trap in the midst of reading one for a syntax
# error, and exits with 2.
address() { url=$scheme://$url_host:${ports[$1]}; }

# What to run next. All but the commands are comments, so that it can be pasted as a whole.
show_gateway() {
  local -a launch=(pd-extproc launch --pd-disaggregation)
  local worker url
  if [[ $engine == vllm && $scheme == http ]]; then
    echo "# The gateway (README.md: where pd-extproc is). vLLM's HTTP server does not tell its connector: start without workers, then"
    echo "# register them, and again after every restart of the gateway."
    ((DP_SIZE == 1)) || launch+=(--dp-aware)
    show "${launch[@]}" --host 0.0.0.0 --port "$GATEWAY_PORT"
    for worker in "${!names[@]}"; do show_registration "$worker"; done
    [[ $KV_BACKEND == nixl ]] ||
      echo "# Engine ids are new at every start of the workers: DELETE /workers/ID then, and register the new ones."
    return
  fi
  for worker in "${!names[@]}"; do
    address "$worker"
    launch+=("--${roles[$worker]}" "$url")
    [[ -z ${bootstrap_ports[$worker]} ]] || launch+=("${bootstrap_ports[$worker]}")
  done
  echo "# The gateway (README.md: where pd-extproc is)."
  if [[ $scheme == grpc ]]; then
    launch+=(--model-path "$model")
    [[ $DP_SIZE == 1 || $KV_BACKEND == nixl ]] || launch+=(--dp-aware)
  fi
  show "${launch[@]}" --host 0.0.0.0 --port "$GATEWAY_PORT"
}

show_registration() {
  local body url
  address "$1"
  body="{\"url\": \"$url\", \"worker_type\": \"${roles[$1]}\", \"kv_connector\": \"$connector\""
  if [[ -n ${bootstrap_ports[$1]} ]]; then
    body+=", \"kv_engine_id\": \"${engine_ids[$1]}\", \"bootstrap_port\": ${bootstrap_ports[$1]}"
  fi
  # Of a prefill worker, for the ids of its ranks; of a decode worker, each of whose ranks is told of moved prefills.
  [[ $KV_BACKEND != mooncake || $DP_SIZE == 1 ]] || body+=", \"labels\": {\"dp_size\": \"$DP_SIZE\"}"
  printf "curl -X POST http://localhost:%s/workers \\\\\n  -H 'Content-Type: application/json' \\\\\n  -d '%s}'\n" \
    "$GATEWAY_PORT" "$body"
}

show_all() {
  local worker
  for worker in "${!names[@]}"; do
    compose "$worker"
    echo "# ${names[$worker]}, in a terminal of its own"
    show "${environment[@]}" "${command[@]}"
    echo
  done
  [[ $engine != vllm ]] ||
    echo "# The engine ids are for one start only: print this anew for the next, for handoffs to an old id may hang."
  show_gateway
}

# ---- Running them

pids=()
ending=0 # the exit code that a signal has asked for

start_workers() {
  local worker port
  compose 0
  command -v "${command[0]}" >/dev/null || fail "${command[0]}: command not found" 1
  [[ $model != [/.]* || -e $model ]] || fail "model $model: no such file or directory"
  unset 'claimed[$GATEWAY_PORT]' # it may be there already
  for port in "${!claimed[@]}"; do
    ! listening "$port" || fail "port $port for ${claimed[$port]}: in use" 1
  done
  LOG_DIR=${LOG_DIR:-$(mktemp -d "${TMPDIR:-/tmp}/pd-workers.XXXXXX")}
  mkdir -p "$LOG_DIR"
  exec {started}<> <(:) # a pipe that never ends: workers write to it as they start, and pauses read nothing from it
  trap stop_workers EXIT
  # Only noted: Bash loses track of its children when a trap exits while it starts one (seen with 5.2: it waits for a
  # worker as if for a command of its own, or says "wait_for: No record of process").
  trap 'ending=129' HUP
  trap 'ending=130' INT
  trap 'ending=143' TERM
  for worker in "${!names[@]}"; do
    start_worker "$worker"
    end_if_asked
  done
}

end_if_asked() { ((!ending)) || exit "$ending"; }

start_worker() {
  local log=$LOG_DIR/${names[$1]}.log url
  compose "$1"
  address "$1"
  echo "# ${names[$1]}: $url, GPUs ${gpus[$1]:-not chosen}, log $log"
  set -m # a process group of its own: an engine is many processes, and all must go
  env "${environment[@]}" sh -c 'echo >&3 && exec 3>&- "$0" "$@"' "${command[@]}" >"$log" 2>&1 </dev/null 3>&"$started" &
  set +m
  pids+=("$!")
  # Until it is a program of its own, with none of this shell's signal handlers, a signal to it may be lost.
  until read -r -t 5 -u "$started" || ! kill -0 "$!" 2>/dev/null; do :; done
}

# pause SECONDS: or less, on a signal.
pause() { read -r -t "$1" -u "$started" || true; }

await_workers() {
  local -a waiting=("${!names[@]}") still
  local deadline=$((SECONDS + READY_SECONDS)) worker
  while ((${#waiting[@]})); do
    still=()
    for worker in "${waiting[@]}"; do
      if serves "${ports[$worker]}"; then echo "# ${names[$worker]} is up"; else still+=("$worker"); fi
    done
    waiting=("${still[@]}")
    end_if_asked
    report_ended
    ((${#waiting[@]})) || break
    if ((SECONDS >= deadline)); then
      fail "${names[${waiting[0]}]} is not up after READY_SECONDS=$READY_SECONDS; its log is in $LOG_DIR" 1
    fi
    pause 0.3
  done
}

serves() { if [[ $scheme == grpc ]]; then listening "$1"; else healthy "$1"; fi; }

# Both in a subshell: there a refused or broken connection ends nothing else.
listening() { (exec 3<>"/dev/tcp/$probe_host/$1") 2>/dev/null; }

healthy() {
  (
    exec 3<>"/dev/tcp/$probe_host/$1" &&
      printf 'GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n' >&3 &&
      read -r -t 5 status <&3 &&
      [[ $status == 'HTTP/1.'?' 200'* ]]
  ) 2>/dev/null
}

# Exits when a worker is no longer there.
report_ended() {
  local worker code log
  for worker in "${!pids[@]}"; do
    ! kill -0 "${pids[$worker]}" 2>/dev/null || continue
    code=0
    wait "${pids[$worker]}" 2>/dev/null || code=$?
    log=$LOG_DIR/${names[$worker]}.log
    tail -n 10 "$log" >&2
    fail "${names[$worker]} has ended with exit code $code (see above, and $log); ending the others" 1
  done
}

# On exit, whatever the reason: TERM for all, KILL for those that stay, or for all on a second signal.
stop_workers() {
  trap - EXIT
  trap 'STOP_SECONDS=0' HUP INT TERM
  signal_workers TERM || true
  local deadline=$((SECONDS + STOP_SECONDS))
  while signal_workers 0 && ((SECONDS < deadline && STOP_SECONDS)); do pause 0.2; done
  signal_workers KILL || true
  wait 2>/dev/null || true
}

# signal_workers SIGNAL: to all processes of all workers; fails when there are none.
signal_workers() {
  local pid found=1
  for pid in "${pids[@]}"; do
    ! kill -s "$1" -- "-$pid" 2>/dev/null || found=0
  done
  return "$found"
}

read_arguments "$@"
read_environment
plan
if [[ -n $dry_run ]]; then
  show_all
  exit
fi
start_workers
await_workers
echo "# All workers are up; Ctrl-C ends them."
show_gateway
# Not wait -n: it misses a worker whose end the shell has noticed before.
while end_if_asked && report_ended; do pause 1; done
