# Prints what several files of measurements have: for each kind and size a line with the median over each competitor's files, and how many times as long
# the fastest of Open MPI's settings takes as the one of ours that the variable "ours" names. A file is called COMPETITOR.ROUND.json, Open MPI's begin
# with "mpi-", and every row of it is a line of its own. Exits with 1 if ours is slower anywhere, or a figure is missing.
function field(name,    at, rest) {
	at = index($0, "\"" name "\":")
	if (!at) return ""
	rest = substr($0, at + length(name) + 3)
	sub(/[,}].*/, "", rest)
	gsub(/"/, "", rest)
	return rest
}

function median(who, what,    n, i, j, x, v) {
	n = count[who, what]
	for (i = 1; i <= n; i++) v[i] = value[who, what, i]
	for (i = 2; i <= n; i++) {
		x = v[i]
		for (j = i - 1; j >= 1 && v[j] > x; j--) v[j + 1] = v[j]
		v[j + 1] = x
	}
	return (v[int((n + 1) / 2)] + v[int(n / 2) + 1]) / 2
}

FNR == 1 {
	who = FILENAME
	sub(/.*\//, "", who)
	sub(/\..*/, "", who)
	if (!(who in known)) { known[who] = 1; all[++names] = who }
}

/"kind":/ && /"median_us":/ {
	what = sprintf("%-14s %12d", field("kind"), field("bytes"))
	if (!(what in seen)) { seen[what] = 1; order[++rows] = what }
	value[who, what, ++count[who, what]] = field("median_us") + 0
}

END {
	printf "%-14s %12s", "kind", "bytes"
	for (k = 1; k <= names; k++) printf " %21s", all[k] " us"
	printf " %22s\n", "Open MPI / " ours
	for (i = 1; i <= rows; i++) {
		what = order[i]
		best = mine = 0
		printf "%s", what
		for (k = 1; k <= names; k++) {
			if (!count[all[k], what]) { printf " %21s", "-"; slower = 1; continue }
			m = median(all[k], what)
			printf " %21.2f", m
			if (all[k] ~ /^mpi-/ && (!best || m < best)) best = m
			if (all[k] == ours) mine = m
		}
		printf " %22.2f\n", mine ? best / mine : 0
		if (!best || !mine || mine > best) slower = 1
	}
	exit slower || !rows
}
