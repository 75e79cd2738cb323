# A guest that reads 480 KiB of its first disk into 8 pieces of memory, 15 whole pages each, for each byte that comes from the console.
# It prints the sum of their 32-bit words in hex. First it prints an R; it prints an X and ends if the disk fails.
.code16
.globl _start
_start:
 cli
 xor %ax,%ax
 mov %ax,%ds
 mov %ax,%ss
 mov %ax,%es
 mov $0x7000,%sp
 mov %dl,drive            # the BIOS's number of the disk it booted from
 sti
 mov $'R',%al
 call put
 mov $10,%al
 call put
outer: mov $0x3fd,%dx     # waits for a byte
 in %dx,%al
 test $1,%al
 jz outer
 mov $0x3f8,%dx
 in %dx,%al
 movw $0x1000,segment
 movl $128,sector
1: movw $120,packet+2
 mov $0x42,%ah            # extended read
 mov drive,%dl
 mov $packet,%si
 int $0x13
 jc bad
 addl $120,sector
 addw $0x1000,segment
 cmpw $0x9000,segment
 jne 1b
 xor %ebp,%ebp
 mov $0x1000,%bx
2: mov %bx,%fs
 xor %si,%si
 mov $15360,%cx           # 32-bit words in 60 KiB
3: add %fs:(%si),%ebp
 add $4,%si
 loop 3b
 add $0x1000,%bx
 cmp $0x9000,%bx
 jne 2b
 mov %ebp,%eax
 mov $8,%cx
4: rol $4,%eax
 mov %eax,%esi
 and $15,%eax
 add $48,%al
 cmp $57,%al
 jbe 5f
 add $39,%al
5: call put
 mov %esi,%eax
 dec %cx
 jnz 4b
 mov $10,%al
 call put
 jmp outer
bad: mov $'X',%al
 call put
 mov $10,%al
 call put
 cli
 hlt
put: mov %al,%ah          # waits until the last character has gone, or this one would replace it
 mov $0x3fd,%dx
6: in %dx,%al
 test $0x20,%al
 jz 6b
 mov %ah,%al
 mov $0x3f8,%dx
 out %al,%dx
 ret
drive: .byte 0
.align 4
packet: .byte 16,0
 .word 0                  # sectors
 .word 0                  # to here in the segment
segment: .word 0
sector: .quad 0           # from here on
.org 510
.word 0xaa55
