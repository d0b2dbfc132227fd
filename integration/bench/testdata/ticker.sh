# See ticker.c. The shell starts no program: read waits for a FIFO that nobody writes to.
look() { at=$EPOCHREALTIME; at=${at%.*}${at#*.}; }
exec 3<>/ticks/wake
look
echo "$at 0" >>/ticks/gaps
last=$at
while :; do
	read -r -t 0.001 _ <&3
	look
	[ $((at - last)) -le 4000 ] || echo "$at $((at - last))" >>/ticks/gaps
	last=$at
done
